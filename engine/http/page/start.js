// The last part of the script: all that is above is definitions.

startKey();
startViews();
startChat();
startWatch();
learnModels().catch(() => {}); // the watch says what is wrong; a request without a model still has an answer
