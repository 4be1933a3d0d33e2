// The settings drawer: converts the settings to request fields and stores them.

const SETTINGS = "penstock-settings"; // the key in local storage

const settings = () => byId("settings").querySelectorAll("input, select, textarea");
const nameOf = (input) => input.dataset.field ?? input.id;

/** Return the settings as fields of a request; null if a field is invalid. */
function readSettings() {
  const fields = { model: byId("model").value || undefined };
  for (const input of document.querySelectorAll("[data-field]")) {
    if (!valid(input)) return null;
    if (input.value !== "") fields[input.dataset.field] = Number(input.value);
  }
  const box = byId("tools");
  box.setCustomValidity("");
  if (box.value.trim() === "") return fields;
  try {
    fields.tools = JSON.parse(box.value);
    if (!Array.isArray(fields.tools)) throw new Error(`${box.value.trim().slice(0, 20)} is none`);
  } catch (error) {
    box.setCustomValidity(`This is not a list of tools: ${error.message}`);
  }
  return valid(box) ? fields : null;
}

function valid(input) {
  if (input.checkValidity()) return true;
  if (!byId("settings").matches(":popover-open")) byId("settings").showPopover();
  input.reportValidity();
  return false;
}

function startSettings() {
  const kept = readKept(SETTINGS);
  for (const input of settings()) input.value = kept?.[nameOf(input)] ?? input.value;
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
