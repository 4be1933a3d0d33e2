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
  if (byId("tools").value.trim() !== "") {
    fields.tools = readJson("tools", "a list of tools", Array.isArray);
    if (fields.tools === null) return null;
  }
  const form = byId("form").value;
  if (form === "json_object") fields.response_format = { type: form };
  if (form === "json_schema") {
    const schema = readJson("schema", "a JSON schema", (value) => value instanceof Object);
    if (schema === null) return null;
    fields.response_format = { type: form, json_schema: { name: "answer", schema, strict: true } };
  }
  return fields;
}

function readJson(id, what, isRight) {
  const box = byId(id);
  let value = null;
  box.setCustomValidity("");
  try {
    value = JSON.parse(box.value);
    if (!isRight(value)) throw new Error(`${box.value.trim().slice(0, 20)} is none`);
  } catch (error) {
    box.setCustomValidity(`This is not ${what}: ${error.message}`);
  }
  return valid(box) ? value : null;
}

function valid(input) {
  if (input.checkValidity()) return true;
  if (!byId("settings").matches(":popover-open")) byId("settings").showPopover();
  input.reportValidity();
  return false;
}

/** Update the elements that depend on a setting. */
function applySettings() {
  byId("schema-field").hidden = byId("form").value !== "json_schema";
  document.documentElement.style.colorScheme = byId("colours").value;
}

function startSettings() {
  const kept = readKept(SETTINGS);
  for (const input of settings()) input.value = kept?.[nameOf(input)] ?? input.value;
  applySettings();
  byId("settings").addEventListener("change", () => {
    applySettings();
    store(SETTINGS, JSON.stringify(Object.fromEntries([...settings()].map((input) => [nameOf(input), input.value]))));
  });
}

/** Load the served names into the list of models; the charts report a server that does not answer. */
async function learnModels() {
  try {
    const { data } = await bodyOf(await ask("/v1/models"), "json");
    const chosen = byId("model").value || readKept(SETTINGS)?.model;
    byId("model").replaceChildren(...data.map(({ id }) => new Option(id, id, false, id === chosen)));
  } catch {
    byId("model").replaceChildren(); // a request without a model is answered too
  }
}
