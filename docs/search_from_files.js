// Browsers start no workers for a page that was opened from a file, and the search runs in one: give it a hidden frame.
if (location.protocol === "file:") {
  const script = (rest) => `<script ${rest}<\/script>`

  // What the code of a worker expects to find around it.
  const surroundings = `
    postMessage = (data) => parent.postMessage(data, "*")
    importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((resolve) => {
      const each = document.createElement("script")
      each.src = url
      each.onload = resolve
      document.body.appendChild(each)
    })), Promise.resolve())`

  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      window.addEventListener("message", (event) => {
        if (event.source !== this.frame.contentWindow) return
        const copy = new MessageEvent("message", { data: event.data })
        this.dispatchEvent(copy)
        if (this.onmessage) this.onmessage(copy)
      })
      const inside = this.frame.contentWindow
      inside.document.open()
      inside.document.write(`<html><body>${script(`>${surroundings}`)}${script(`src="${url}">`)}</body></html>`)
      inside.document.close()
      // Only now: opening a document takes its listeners away.
      this.ready = new Promise((resolve) => { inside.onload = resolve })
    }

    postMessage(data) {
      this.ready.then(() => {
        this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) }))
      })
    }

    terminate() {
      this.frame.remove()
    }
  }
}
