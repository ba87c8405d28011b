// The stream of events. fetch and not EventSource, which could send no key.

/** Pieces of text -> [name, data] of each event that is complete; keeps the rest for the next piece. */
export function eventParser() {
  let rest = "";
  return (text) => {
    const parts = (rest + text).split("\n\n");
    rest = parts.pop();
    return parts.map((part) => {
      const fields = Object.fromEntries(part.split("\n").map((line) => [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 1).trimStart()]));
      return [fields.event, JSON.parse(fields.data)];
    });
  };
}

/** The key for every request of this page, kept nowhere else. */
export const access = { key: "" };

/** Headers that carry it. */
export const keyed = () => (access.key ? { "X-API-Key": access.key } : {});

const HIDDEN_MS = 10_000; // a page that nobody sees lets go of its stream
const RETRY_MS = [500, 1000, 2000, 5000];

/**
 * Follow the events for as long as the page is seen.
 * on.event(name, data); on.state(text); on.refused(message): a key is needed, `restart()` goes on.
 */
export function follow(url, on) {
  let current = null;
  let attempts = 0;
  let timer = 0;
  let hiding = 0;

  async function run() {
    clearTimeout(timer);
    current?.abort();
    const mine = (current = new AbortController());
    try {
      const response = await fetch(url, { headers: keyed(), signal: mine.signal, cache: "no-store" });
      if (response.status === 401 || response.status === 403) {
        on.state("Not connected: a key is needed");
        on.refused((await response.json()).error);
        return;
      }
      if (!response.ok) throw new Error((await response.json()).error);
      on.state("Live");
      const parse = eventParser();
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        attempts = 0;
        for (const [name, data] of parse(value)) on.event(name, data);
      }
      throw new Error("the stream ended");
    } catch (error) {
      if (mine.signal.aborted) return;
      on.state(`Not connected: ${error.message}; trying again`);
      timer = setTimeout(run, RETRY_MS[Math.min(attempts++, RETRY_MS.length - 1)]);
    }
  }

  document.addEventListener("visibilitychange", () => {
    clearTimeout(hiding);
    if (document.hidden) {
      hiding = setTimeout(() => {
        clearTimeout(timer);
        current?.abort();
        current = null;
      }, HIDDEN_MS);
    } else if (current === null) {
      run();
    }
  });
  run();
  return { restart: run };
}
