// Browsers refuse a worker to a page that is opened from the disk, and search would stay silent.
// There the same script runs in a hidden frame; on a server nothing is changed.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(path) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.frame = new Promise((ready) => {
        const script = inside.document.createElement("script");
        script.src = new URL(path, document.baseURI);
        script.onload = () => ready(inside);
        inside.document.head.append(script);
      });
    }

    async postMessage(data) {
      const inside = await this.frame;
      inside.dispatchEvent(new inside.MessageEvent("message", { data }));
    }

    terminate() {}
  };
