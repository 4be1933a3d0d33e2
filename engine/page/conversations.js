// The stored conversations, kept only in the browser's local storage.
//
// Each has its own key. A conversation is {id, at, turns}; a turn is {role, content} with display data. Stored data may
// be from another version of this page. Tabs are not synchronized: the last write wins.

const KEPT = "penstock-chat:"; // prefix of the keys
const MOST_KEPT = 50; // conversations
const MOST_CHARACTERS = 2_000_000; // total size as JSON, less than half of the browsers' limit

const newId = () => `${Date.now().toString(36)}${Math.random().toString(36).slice(2)}`;
const newTalk = () => ({ id: newId(), at: 0, turns: [] });
const titleOf = (talk) => talk?.turns.find((turn) => turn.role === "user")?.content.trim().slice(0, 80) || "Untitled";

/** Read a key from local storage; return null if it is missing or unreadable. */
function readKept(key) {
  try {
    return JSON.parse(local.getItem(key));
  } catch {
    return null;
  }
}

function readTalk(id) {
  const talk = readKept(KEPT + id);
  const isTurn = (turn) => typeof turn?.role === "string" && typeof turn.content === "string";
  return talk?.id === id && Array.isArray(talk.turns) && talk.turns.every(isTurn) ? talk : null;
}

/** Return the stored conversations, newest first. */
function readTalks() {
  const ids = Object.keys(local).filter((key) => key.startsWith(KEPT)).map((key) => key.slice(KEPT.length));
  return ids.map(readTalk).filter((talk) => talk !== null).sort((a, b) => b.at - a.at);
}

/** Store the conversation; delete the oldest others if space is needed. */
function keepTalk(talk) {
  talk.at = Date.now();
  const text = JSON.stringify(talk);
  let room = MOST_CHARACTERS - text.length;
  if (room < 0) return void noteKeeping("This conversation is too long to be kept.");
  const others = readTalks().filter((other) => other.id !== talk.id);
  others.forEach((other, i) => {
    room -= local.getItem(KEPT + other.id).length;
    if (room < 0 || i >= MOST_KEPT - 1) dropTalk(other.id);
  });
  store(KEPT + talk.id, text);
}

const dropTalk = (id) => local.removeItem(KEPT + id);

/** Write to local storage; show an error if the browser refuses. */
function store(name, text) {
  try {
    local.setItem(name, text);
    noteKeeping(local instanceof Storage ? "" : "This browser allows no storage: all of it ends with the page.");
  } catch {
    noteKeeping("The browser's storage is full: what is new is not kept. Delete conversations to make room.");
  }
}

const noteKeeping = (text) => (byId("kept-note").textContent = text);

/** Show the list with the open conversation highlighted. */
function showTalks(openId, pick, drop) {
  const rows = readTalks().map((talk) => {
    const open = button(titleOf(talk), () => pick(talk.id), "quiet title");
    if (talk.id === openId) open.setAttribute("aria-current", "true");
    open.title = new Date(talk.at).toLocaleString();
    const remove = button("×", () => drop(talk.id), "quiet title");
    remove.setAttribute("aria-label", `Delete ${titleOf(talk)}`);
    return make("li", "", open, remove);
  });
  byId("past-list").replaceChildren(...rows);
  byId("past-clear").hidden = rows.length === 0;
}
