// Ties the panels to the stream of events, and asks for a key where the service does.
import { minutesPanel } from "./charts.js";
import { at, number, say } from "./dom.js";
import { showModels } from "./models.js";
import { access, follow } from "./stream.js";
import { offerModels, startForm } from "./try.js";
import { windowsPanel } from "./windows.js";

const windows = windowsPanel();
const minutes = minutesPanel();
startForm();
setInterval(windows.tick, 1000);

const on = {
  hello: (server) => {
    minutes.limit(server.samples);
    const replicas = server.replicas > 1 ? `, one of ${server.replicas} replicas (process ${server.process})` : "";
    const packing = server.windows ? `windows wait ${number(server.max_wait_ms)} ms` : "windows are off";
    say(at("server"), `${server.version} on ${server.provider}, ${number(server.threads)} ${server.threads === 1 ? "thread" : "threads"}, ${packing}${replicas}`);
  },
  models: (rows) => { showModels(rows); offerModels(rows); },
  history: minutes.set,
  sample: minutes.add,
  windows: windows.add,
  bye: () => say(at("connection"), "The service is stopping"),
};

const dialog = at("key-dialog");
const stream = follow("v2/console/events", {
  event: (name, data) => on[name](data),
  state: (text) => say(at("connection"), text),
  refused: (message) => {
    say(at("key-why"), message);
    at("key-open").hidden = false;
    if (!dialog.open) dialog.showModal();
  },
});

at("key-open").addEventListener("click", () => dialog.showModal());
at("key-cancel").addEventListener("click", () => dialog.close());
at("key-form").addEventListener("submit", (submission) => {
  submission.preventDefault();
  access.key = at("key").value.trim();
  at("key").value = "";
  at("key-open").hidden = true;
  dialog.close();
  stream.restart();
});
