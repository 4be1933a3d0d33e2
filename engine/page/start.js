// The last part of the script; all parts before are definitions.

startKey();
startViews();
startDrawers();
startSettings();
startChat();
startWatch();
