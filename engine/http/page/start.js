// The last part of the script: all that is above is definitions.

startKey();
startViews();
startDrawers();
startSettings();
startChat();
startWatch();
