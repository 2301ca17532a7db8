const chains = JSON.parse(document.getElementById("data").textContent);
const controls = document.getElementById("controls");
const list = document.getElementById("episodes");
const SOURCES = { training: "training, last iteration", evaluation: "evaluation, last policy" };

// An element with a class and text, or with children. Text of a run never becomes HTML.
function element(tag, name, content) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  for (const part of [content ?? []].flat()) made.append(part);
  return made;
}

function signed(value) {
  return (value < 0 ? "−" : "+") + Math.abs(value).toFixed(3);
}

function turnOf(turn, number) {
  const reply = element("span", "say", turn.action || "(empty)");
  const facts = [`turn ${number}`, `reward ${signed(turn.reward)}`];
  if (turn.value != null) facts.push(`value ${signed(turn.value)}`);
  if (turn.advantage != null) {
    facts.push(`advantage ${signed(turn.advantage)}`);
    reply.classList.add("worth", turn.advantage < 0 ? "hurt" : "help");
    reply.style.setProperty("--strength", Math.min(Math.abs(turn.advantage) / STRONG, 1));
  }
  facts.push(turn.stop, ...(turn.invalid ? ["invalid"] : []));
  const act = element("div", "act", [reply, element("span", "meta", facts.join(" · "))]);
  return [element("div", "env say", turn.observation), act];
}

function transcript(entry) {
  const outcome = entry.failure ? "failed in its environment" : entry.success ? "success" : "no success";
  const parts = [element("h4", "", entry.origin), ...entry.turns.flatMap(turnOf)];
  if (entry.failure) parts.push(element("p", "lost", entry.failure));
  return element("div", "", [...parts, element("p", "muted", `${outcome} · return ${signed(entry.return)}`)]);
}

function episodeOf(entry) {
  const header = element("header", "", [
    element("b", "", entry.id), `task ${entry.task}`, entry.kinds.join(", "),
  ].filter(Boolean).map((part) => (part.nodeType ? part : element("span", "", part))));
  const sides = entry.before ? [element("div", "sides", [transcript(entry.before), transcript(entry)])] : [transcript(entry)];
  return element("article", "episode", [header, ...sides]);
}

function holds(entry, text) {
  const words = [entry.id, entry.task, ...entry.turns.flatMap((turn) => [turn.observation, turn.action])];
  return words.some((word) => word.toLowerCase().includes(text));
}

function chosen() {
  const { chain, source, only, text } = Object.fromEntries(new FormData(controls));
  const entries = chains[chain]?.sources[source] ?? [];
  const found = entries.filter((entry) => holds(entry, text.toLowerCase()));
  if (only === "worst" || only === "best") {
    const sign = only === "worst" ? 1 : -1;
    return found.filter((entry) => !entry.failure).sort((a, b) => sign * (a.return - b.return));
  }
  return only === "all" ? found : found.filter((entry) => entry.kinds.includes(only));
}

function show() {
  const entries = chosen();
  list.replaceChildren(...entries.map(episodeOf));
  document.getElementById("count").value = `${entries.length} episode${entries.length === 1 ? "" : "s"}.`;
  history.replaceState(null, "", "#" + new URLSearchParams(new FormData(controls)));
}

// The options that there are, and the state that the address asks for, so that a view can be linked to.
chains.forEach((chain, number) => controls.chain.append(new Option(chain.name, number)));
for (const [name, label] of Object.entries(SOURCES)) {
  if (chains.some((chain) => chain.sources[name].length)) controls.source.append(new Option(label, name));
}
for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
  if (controls.elements[name]) controls.elements[name].value = value;
}
controls.addEventListener("input", show);
controls.addEventListener("submit", (event) => event.preventDefault());
show();
