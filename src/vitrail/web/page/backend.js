// Two backends that answer alike (docs/web.md): a server, or the model in a worker of this browser.

export class BackendError extends Error {
  constructor(message, gone = false) {
    super(message);
    this.gone = gone; // the image is no longer kept; upload it again
  }
}

export async function openBackend() {
  const { backend } = await (await fetch("backend.json")).json();
  return backend === "server" ? new ServerBackend() : new BrowserBackend();
}

class ServerBackend {
  kind = "server";

  models() {
    return this.#ask("api/models");
  }

  describe(model) {
    return this.#ask("api/model", { model });
  }

  /** Send a file for a model, and all others of its modality; return the name of what was sent. */
  upload(file, model) {
    return this.#ask(`api/image?model=${encodeURIComponent(model)}`, file);
  }

  /** Return the image that is painted on, and marks of time and frequency. */
  preview(image, model) {
    return this.#ask("api/preview", { image, model });
  }

  view(name, given) {
    return this.#ask(`api/view/${name}`, given);
  }

  async #ask(path, given) {
    const body = given instanceof Blob ? given : given && JSON.stringify(given);
    let response;
    try {
      response = await fetch(path, given === undefined ? {} : { method: "POST", body });
    } catch {
      throw new BackendError("The server does not answer. Is vitrail web still running?");
    }
    const answer = await response.json().catch(() => ({ error: `The server answered ${response.status}.` }));
    if (!response.ok) throw new BackendError(answer.error, String(answer.error).startsWith("gone:"));
    return answer;
  }
}

class BrowserBackend {
  kind = "browser";
  #worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
  #waiting = new Map();
  #next = 0;
  #previews = new Map();

  constructor() {
    this.#worker.onmessage = ({ data }) => {
      const { resolve, reject } = this.#waiting.get(data.id);
      this.#waiting.delete(data.id);
      if (data.error) reject(new BackendError(data.error, data.gone));
      else resolve(data.answer);
    };
    this.#worker.onerror = (event) => {
      for (const { reject } of this.#waiting.values()) reject(new BackendError(event.message || "The worker failed."));
      this.#waiting.clear();
    };
  }

  models() {
    return this.#ask("models");
  }

  describe(model) {
    return this.#ask("describe", model);
  }

  async upload(file) {
    const { preview, ...answer } = await this.#ask("upload", file);
    if (!this.#previews.has(answer.image)) {
      this.#previews.set(answer.image, URL.createObjectURL(preview));
      if (this.#previews.size > 24) {
        const [oldest, url] = this.#previews.entries().next().value;
        URL.revokeObjectURL(url);
        this.#previews.delete(oldest);
      }
    }
    return answer;
  }

  async preview(image) {
    if (!this.#previews.has(image)) throw new BackendError("gone: upload the image again", true);
    return { url: this.#previews.get(image) };
  }

  view(name, given) {
    return this.#ask(name, given);
  }

  #ask(call, given) {
    const id = this.#next++;
    return new Promise((resolve, reject) => {
      this.#waiting.set(id, { resolve, reject });
      this.#worker.postMessage({ id, call, given });
    });
  }
}
