// Work of a page in the browser: keyboard, input field, charts and the browser's storage.
window.hadal = {
  store(name, text) {
    try {
      if (text) localStorage.setItem(name, text);
      else localStorage.removeItem(name);
      hadal.isFull = false;
    } catch {
      // Notify once: a running answer is stored again every second.
      if (!hadal.isFull) Quasar.Notify.create({
        type: "warning",
        message: "This browser keeps nothing more, so what is new here goes with the page. Delete conversations to make room.",
        timeout: 0,
        actions: [{ label: "OK", color: "dark" }],
      });
      hadal.isFull = true;
    }
  },
  // The list of conversations without texts: a message on the page's socket may have 1 MB at most.
  kept(prefix, most) {
    const found = [];
    for (const name of Object.keys(localStorage)) {
      if (!name.startsWith(prefix) || name.length > 100) continue;
      try {
        const { title, changed_ms } = JSON.parse(localStorage.getItem(name));
        const words = [...String(title ?? "")].slice(0, 64).join("");
        found.push({ id: name.slice(prefix.length), title: words, changed_ms: Number(changed_ms) || 0 });
      } catch {
        continue;  // Not a conversation.
      }
    }
    return found.sort((one, other) => other.changed_ms - one.changed_ms).slice(0, most);
  },
  // Return [piece of the text stored under a name, end of the piece, whether it is the last one].
  piece(name, begin, most) {
    const text = localStorage.getItem(name) ?? "";
    let end = Math.min(text.length, begin + most);
    // Do not split a character of two code units.
    if (end < text.length && (text.charCodeAt(end - 1) & 0xfc00) === 0xd800) end -= 1;
    return [text.slice(begin, end), end, end === text.length];
  },
  mostBytes: 400_000,
  grow(field) {
    field.style.height = "auto";
    field.style.height = Math.min(field.scrollHeight, 220) + "px";
  },
  send(field, emit) {
    if (!field.value.trim() || document.querySelector(".h-stop:not(.hidden)")) return;
    // A message of over 1 MB would close the page's socket, and JSON quotes the text twice.
    const size = new Blob([JSON.stringify(field.value)]).size;
    if (size > hadal.mostBytes) {
      field.setCustomValidity(`This message has ${size.toLocaleString("en")} bytes; the page sends at most ${hadal.mostBytes.toLocaleString("en")}. Send less of it.`);
      field.reportValidity();
      return;
    }
    emit(field.value);
    field.value = "";
    hadal.grow(field);
  },
  field: () => document.getElementById("h-input"),
  // On pages from another host over plain HTTP, browsers have no navigator.clipboard.
  copy(text) {
    if (navigator.clipboard) return navigator.clipboard.writeText(text);
    const field = Object.assign(document.createElement("textarea"), { value: text });
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  },
  fill(text) {
    const field = hadal.field();
    field.value = text;
    hadal.grow(field);
    field.focus();
  },
  focus() {
    const field = hadal.field();
    if (field && matchMedia("(pointer: fine)").matches) field.focus();
  },
  bottom() {
    const box = document.getElementById("h-scroll");
    if (box) box.scrollTop = box.scrollHeight;
  },
  heat(id, columns, cells) {
    // One pixel per cell; the browser scales them up.
    const canvas = document.getElementById("c" + id);
    if (!canvas || !columns) return;
    const levels = Uint8Array.from(atob(cells), (char) => char.charCodeAt(0));
    canvas.width = columns;
    canvas.height = levels.length / columns;
    const image = new ImageData(canvas.width, canvas.height);
    levels.forEach((level, at) => image.data.set(hadal.ramp[level], 4 * at));
    canvas.getContext("2d").putImageData(image, 0, 0);
    canvas.style.height = Math.min(340, Math.max(150, 6 * canvas.height)) + "px";
    canvas.onmousemove = (event) => {
      const box = canvas.getBoundingClientRect();
      const column = Math.min(columns - 1, Math.floor((columns * (event.clientX - box.left)) / box.width));
      const row = Math.min(canvas.height - 1, Math.floor((canvas.height * (event.clientY - box.top)) / box.height));
      const load = ((levels[row * columns + column] * canvas.dataset.most) / 255).toFixed(2);
      canvas.title = `layer ${row}, ${canvas.dataset.column.split(" ")[1]} ${column}: ${load} times the mean`;
    };
  },
  chart(id, options) {
    const box = document.getElementById("c" + id);
    if (!box) return;
    hadal.charts.set(box, { id, options });
    // A new observer's first callback reports whether the chart is in view.
    if (box.isInView === undefined) hadal.view.observe(box);
    else if (box.isInView) hadal.draw(box);
  },
  draw(box) {
    const found = hadal.charts.get(box);
    if (!found) return;
    const chart = getElement(found.id)?.chart;
    if (!chart) {
      if (box.isConnected) setTimeout(() => hadal.draw(box), 50);  // The chart is still being made.
      return;
    }
    hadal.charts.delete(box);
    chart.setOption(found.options, { replaceMerge: ["series"], lazyUpdate: true });
  },
  // Chart -> options that it does not show yet.
  charts: new WeakMap(),
  view: new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      target.isInView = isIntersecting;
      if (isIntersecting) hadal.draw(target);
    }
  }, { rootMargin: "100px" }),
  keys(id) {
    const tell = (name, detail) => document.getElementById("c" + id).dispatchEvent(new CustomEvent(name, { detail }));
    // Report another page's changes only after a pause: it stores a running answer every second.
    const quiet = new Map();
    window.addEventListener("storage", ({ key }) => {
      if (!key?.startsWith("hadal.chat.")) return;
      clearTimeout(quiet.get(key));
      quiet.set(key, setTimeout(() => tell("kept", key.slice("hadal.chat.".length)), 1500));
    });
    document.onkeydown = (event) => {
      if (event.key === "Escape" && !document.querySelector(".q-dialog")) tell("stop");
      if (event.altKey && event.code === "KeyN") {
        event.preventDefault();
        tell("new");
      }
    };
    const field = hadal.field();
    field.addEventListener("input", () => {
      field.setCustomValidity("");
      hadal.grow(field);
    });
    const box = document.getElementById("h-scroll");
    let height = 0;
    new ResizeObserver(() => {
      // Scroll along with new text, unless the reader has scrolled up.
      if (box.scrollTop + box.clientHeight > height - 120) box.scrollTop = box.scrollHeight;
      height = box.scrollHeight;
    }).observe(box.firstElementChild);
  },
};
hadal.ramp = (() => {
  const stops = [[29, 59, 71], [42, 127, 153], [143, 195, 189], [240, 217, 160], [221, 154, 78], [198, 79, 60]];
  return Array.from({ length: 256 }, (_, level) => {
    const at = (level / 255) * (stops.length - 1);
    const low = Math.min(stops.length - 2, Math.floor(at));
    return [0, 1, 2].map((i) => stops[low][i] + (at - low) * (stops[low + 1][i] - stops[low][i])).concat(255);
  });
})();
// Links in a model's text open in a new tab, so that the chat stays open.
document.addEventListener("click", ({ target }) => {
  const link = target.closest?.(".h-md a");
  if (link) Object.assign(link, { target: "_blank", rel: "noopener noreferrer" });
}, true);
