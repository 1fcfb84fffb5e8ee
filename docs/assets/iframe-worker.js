// Search of a page that is opened as a file: a browser starts no worker for one, so the worker's script runs in a hidden frame.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.window = frame.contentWindow;
      this.window.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = frame.contentDocument.createElement("script");
      script.src = url;
      this.loaded = new Promise((resolve) => (script.onload = resolve));
      frame.contentDocument.head.append(script);
    }
    postMessage(data) {
      this.loaded.then(() => this.window.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
