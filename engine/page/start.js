// The last part of the script; all parts before are definitions.

startKey();
addEventListener("hashchange", showView);
showView();
startDrawers();
startSettings();
startChat();
startWatch();
