// The page while runs go on: asks for new data every second, and shows it; SHOWN names the data that is shown, PAGE this page.
(() => {
  const EVERY = 1000, RARELY = 10000;
  const STILL = 30, ROUNDS = 10; // seconds, and rounds' times, without a change: more than both is odd
  const line = make("p", { id: "live", role: "status" });
  document.querySelector("header").append(line);
  let tag = SHOWN, live = state.data.live, lost = null, trouble = "";

  const span = (s) => (s < 90 ? `${Math.round(s)} s` : s < 5400 ? `${Math.round(s / 60)} min` : `${(s / 3600).toFixed(1)} h`);

  function waiting() {
    if (!live.out) return "● waiting for the first round";
    if (live.to_come.length === live.out) return `● waiting for a run; left out: ${live.to_come.join(", ")}`;
    return `○ nothing to show: ${live.out} left out, see below`;
  }

  function going(rounds) {
    const still = Math.max(0, Date.now() / 1000 - live.changed);
    if (still > Math.max(STILL, ROUNDS * live.pace)) return `○ ${rounds}; no change for ${span(still)}: it may have stopped`;
    const left = live.seconds ? `, about ${span(live.seconds)} of rounds left` : "";
    return `● live: ${rounds}${left}; last change ${span(still)} ago`;
  }

  function tell() {
    const rounds = `round ${live.round} of ${live.rounds}${live.runs > 1 ? ` in ${live.runs} runs` : ""}`;
    const out = live.out ? `; ${live.out} left out, see below` : "";
    if (lost) line.textContent = `○ not connected: the watch has ended; as it stood at ${lost}`;
    else if (trouble) line.textContent = `○ cannot be drawn at the moment: ${trouble}`;
    else if (!live.runs) line.textContent = waiting();
    else line.textContent = (live.left ? going(rounds) : `✓ finished: ${rounds}`) + out;
    line.dataset.state = lost ? "lost" : !live.runs ? "waiting" : live.left ? "live" : "finished";
  }

  /** New data, without closing what a reader has opened or taking away what is held. */
  async function show(data) {
    await untouched();
    const open = [...document.querySelectorAll("details[open] > summary")].map((node) => node.textContent);
    live = data.live;
    const drawn = update(data);
    for (const node of document.querySelectorAll("details > summary")) if (open.includes(node.textContent)) node.parentNode.open = true;
    await drawn;
  }

  async function look() {
    try {
      const answer = await fetch("data.json", { cache: "no-store", headers: { "If-None-Match": tag, Page: PAGE } });
      trouble = answer.status === 500 ? await answer.text() : "";
      if (answer.status === 200) {
        tag = answer.headers.get("ETag");
        await show(await answer.json());
      }
      if (answer.headers.get("Changed")) live.changed = Number(answer.headers.get("Changed")); // newer than what is drawn
      lost = null;
    } catch (error) {
      lost ??= new Date().toLocaleTimeString();
    }
    tell();
    setTimeout(look, lost || document.hidden || (live.runs && !live.left) ? RARELY : EVERY);
  }

  document.addEventListener("visibilitychange", () => document.hidden || tell());
  tell();
  setTimeout(look, EVERY);
})();
