// Functions shared by all views: creating elements, requests to the server, the API key, and switching views.
//
// Text of a model or user becomes only text nodes. The key stays in this tab's session storage and is sent only in the
// header of requests to this origin.

const byId = (id) => document.getElementById(id);

/** Create an element with a class and children; strings become text. */
function make(tag, className = "", ...children) {
  const element = document.createElement(tag);
  element.className = className;
  element.append(...children);
  return element;
}

/** Return the browser's storage of this name; if it is not allowed, a replacement that lives as long as the page. */
function storage(name) {
  try {
    return window[name];
  } catch {
    return Object.create({
      getItem(key) { return this[key] ?? null; },
      setItem(key, text) { this[key] = text; },
      removeItem(key) { delete this[key]; },
    });
  }
}

const local = storage("localStorage");
const session = storage("sessionStorage");

function button(text, act, className = "quiet") {
  const element = make("button", className, text);
  element.type = "button";
  element.addEventListener("click", () => act(element));
  return element;
}

/** Create a copy button. Over plain HTTP, where scripts cannot use the clipboard, it selects the text. */
function copyButton(read) {
  return button("Copy", async (element) => {
    const box = make("textarea", "unseen");
    box.value = read();
    element.after(box);
    box.select();
    const write = navigator.clipboard?.writeText(box.value).then(() => true, () => false);
    const isCopied = (await write) || document.execCommand("copy");
    box.remove();
    element.textContent = isCopied ? "Copied" : "Not allowed";
    element.focus();
  });
}

function setState(kind, text) {
  byId("state").firstElementChild.className = `dot ${kind}`;
  if (byId("state-text").textContent !== text) byId("state-text").textContent = text;
}

let keyWanted = null; // the promise of the open dialog

/** Open the dialog; the promise rejects if it is closed without a key. */
function wantKey(why) {
  keyWanted ??= new Promise((resolve, reject) => {
    const dialog = byId("key");
    byId("key-why").textContent = why;
    byId("key-value").value = "";
    byId("key-open").hidden = false;
    dialog.returnValue = "";
    dialog.addEventListener("close", () => {
      keyWanted = null;
      if (dialog.returnValue === "use") resolve();
      else reject(new Error("this server needs an API key"));
    }, { once: true });
    dialog.showModal();
  });
  return keyWanted;
}

function startKey() {
  const dialog = byId("key");
  dialog.querySelector("form").addEventListener("submit", () => {
    session.setItem("key", byId("key-value").value);
    learnModels();
  });
  byId("key-cancel").addEventListener("click", () => dialog.close(""));
  byId("key-forget").addEventListener("click", () => {
    session.removeItem("key");
    location.reload();
  });
  byId("key-open").addEventListener("click", () => {
    wantKey("The key stays in this tab and is forgotten when the tab is closed.").catch(() => {});
  });
  byId("key-open").hidden = session.getItem("key") === null;
}

/** Fetch with the key, for at most ten seconds if the caller gives no signal; return the response if it succeeded, else
 * throw an error with the server's message. A 401 opens the dialog, unless `mayAsk` is false. */
async function ask(path, options = {}, mayAsk = true) {
  for (;;) {
    const key = session.getItem("key");
    const headers = { ...options.headers };
    if (key !== null) headers.authorization = `Bearer ${key}`;
    const signal = options.signal ?? AbortSignal.timeout(10_000);
    const response = await fetch(path, { ...options, signal, headers, cache: "no-store", credentials: "omit" });
    if (response.ok) return response;
    if (response.status !== 401) throw new Error(await complaint(response));
    if (!mayAsk) throw new Error("this server needs an API key");
    await wantKey(
      key === null
        ? "This server needs a key. It stays in this tab and is forgotten when the tab is closed."
        : "That key was refused.",
    );
  }
}

/** Return the message of an error response, or its status if it has another format. */
async function complaint(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `${response.status} ${response.statusText}`;
  }
}

function showView() {
  const name = location.hash === "#watch" ? "watch" : "chat";
  for (const view of ["chat", "watch"]) byId(view).hidden = view !== name;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (name === "chat") learnModels();
  if (name === "chat" && matchMedia("(min-width: 781px)").matches) byId("say").focus();
}

/** Give every drawer the focus when it opens, unless a field in it has it; the browser restores it when it closes. */
function startDrawers() {
  for (const drawer of document.querySelectorAll("[popover]")) {
    drawer.addEventListener("toggle", ({ newState }) => {
      if (newState === "open" && !drawer.contains(document.activeElement)) drawer.querySelector("button")?.focus();
    });
  }
}
