// The site's search runs in a Worker, which browsers refuse for pages opened from a disk (file:). There it runs in a
// hidden frame, behind the same interface.
class FrameWorker extends EventTarget {
  constructor(url) {
    super();
    const frame = document.createElement("iframe");
    frame.hidden = true;
    document.body.append(frame);
    this.frame = frame;
    this.waiting = []; // messages from before the script has run
    const script = frame.contentDocument.createElement("script");
    script.src = url;
    script.onload = () => {
      const waiting = this.waiting;
      this.waiting = null;
      for (const data of waiting) this.postMessage(data);
    };
    frame.contentWindow.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
    frame.contentDocument.body.append(script);
  }

  postMessage(data) {
    if (this.waiting) this.waiting.push(data);
    else this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
  }

  terminate() {
    this.frame.remove();
  }
}

if (location.protocol === "file:") window.Worker = FrameWorker;
