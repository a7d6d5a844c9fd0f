/* A page that was opened from a folder may start no worker: the search then runs in a hidden frame. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const at = new URL(url, location)
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      this.inside = frame.contentWindow
      this.inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const load = source => new Promise((done, failed) => {
        const script = this.inside.document.createElement("script")
        Object.assign(script, { src: new URL(source, at), onload: done, onerror: failed })
        this.inside.document.body.appendChild(script)
      })
      this.inside.importScripts = (...sources) => Promise.all(sources.map(load))
      this.ready = load(at)
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {
      this.inside.frameElement.remove()
    }
  }
}
