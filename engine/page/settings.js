// The settings drawer: converts the settings to request fields and stores them.

const SETTINGS = "penstock-settings"; // the key in local storage

const settings = () => byId("settings").querySelectorAll("input, select, textarea");
const nameOf = (input) => input.dataset.field ?? input.id;

/** Return the settings as fields of a request; null if a field is invalid: it has the focus then. */
function readSettings() {
  const [invalid] = [...settings()].filter((input) => !isValid(input));
  if (invalid !== undefined) {
    if (!byId("settings").matches(":popover-open")) byId("settings").showPopover();
    invalid.focus();
    return null;
  }
  const fields = { model: byId("model").value || undefined };
  for (const input of document.querySelectorAll("[data-field]")) {
    if (input.value !== "") fields[input.dataset.field] = Number(input.value);
  }
  const tools = byId("tools").value;
  if (tools.trim() !== "") fields.tools = JSON.parse(tools);
  return fields;
}

/** Return what is wrong with a field, which is empty if nothing is. */
function problemOf(input) {
  const text = input.value.trim();
  if (input.id !== "tools" || text === "") return input.validationMessage;
  try {
    if (Array.isArray(JSON.parse(text))) return "";
    return `This is not a list of tools: ${text.slice(0, 20)} is none`;
  } catch (error) {
    return `This is not a list of tools: ${error.message}`;
  }
}

/** Return whether a field is valid; the message of an invalid one is the text under it. */
function isValid(input) {
  const problem = problemOf(input);
  const id = `${nameOf(input)}-problem`;
  byId(id)?.remove();
  input.ariaInvalid = problem === "" ? null : "true";
  if (problem === "") {
    input.removeAttribute("aria-describedby");
    return true;
  }
  const message = make("span", "problem", problem);
  message.id = id;
  message.ariaHidden = "true"; // it describes the field and is no part of its name, although it stands in the label
  input.after(message);
  input.setAttribute("aria-describedby", id);
  return false;
}

function startSettings() {
  const kept = readKept(SETTINGS);
  for (const input of settings()) input.value = kept?.[nameOf(input)] ?? input.value;
  byId("settings").addEventListener("input", ({ target }) => target.ariaInvalid && isValid(target));
  byId("settings").addEventListener("change", () => {
    store(SETTINGS, JSON.stringify(Object.fromEntries([...settings()].map((input) => [nameOf(input), input.value]))));
  });
}

/** Load the served names into the list of models; the charts report a server that does not answer. */
async function learnModels() {
  try {
    const { data } = await (await ask("/v1/models")).json();
    const chosen = byId("model").value || readKept(SETTINGS)?.model;
    byId("model").replaceChildren(...data.map(({ id }) => new Option(id, id, false, id === chosen)));
  } catch {
    byId("model").replaceChildren(); // a request without a model is answered too
  }
}
