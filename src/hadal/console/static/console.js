// What a page does by itself: keys of the keyboard, the field that grows, what the browser keeps.
window.hadal = {
  store(name, text) {
    try {
      if (text) localStorage.setItem(name, text);
      else localStorage.removeItem(name);
    } catch (error) {
      console.warn("The browser keeps nothing more:", error.name);
    }
  },
  kept(prefix) {
    return Object.keys(localStorage).filter((name) => name.startsWith(prefix)).map((name) => localStorage.getItem(name));
  },
  grow(field) {
    field.style.height = "auto";
    field.style.height = Math.min(field.scrollHeight, 220) + "px";
  },
  send(field, emit) {
    if (!field.value.trim() || document.querySelector(".h-stop:not(.hidden)")) return;
    emit(field.value);
    field.value = "";
    hadal.grow(field);
  },
  fill(text) {
    const field = document.getElementById("h-input");
    field.value = text;
    hadal.grow(field);
    field.focus();
  },
  focus() {
    const field = document.getElementById("h-input");
    if (field && matchMedia("(pointer: fine)").matches) field.focus();
  },
  bottom(always) {
    const box = document.getElementById("h-scroll");
    if (box && (always || box.scrollHeight - box.scrollTop - box.clientHeight < 120)) box.scrollTop = box.scrollHeight;
  },
  keys(id) {
    const tell = (name) => document.getElementById("c" + id).dispatchEvent(new CustomEvent(name));
    document.onkeydown = (event) => {
      if (event.key === "Escape") tell("stop");
      if (event.altKey && event.code === "KeyN") {
        event.preventDefault();
        tell("new");
      }
    };
    const field = document.getElementById("h-input");
    field.addEventListener("input", () => hadal.grow(field));
    const box = document.getElementById("h-scroll");
    let height = 0;
    new ResizeObserver(() => {
      // Follow what comes in, unless the reader went up.
      if (box.scrollTop + box.clientHeight > height - 120) box.scrollTop = box.scrollHeight;
      height = box.scrollHeight;
    }).observe(box.firstElementChild);
  },
};
