// What the pages share. A form names an operation of the API; its fields, and the token that the mail's link brought,
// are sent there, and what came of it is said below. A form with data-when="token" is for those who have a token, one
// with data-when="no token" for those who have none, or one that is worthless.
"use strict";

const token = new URLSearchParams(location.hash.slice(1)).get("token") ?? "";
if (token) history.replaceState(null, "", location.pathname); // a secret: not for the address bar and the history
addEventListener("hashchange", () => location.reload()); // another link was opened in this tab

const status = document.querySelector("[role=status]");

function say(state, text) {
  status.dataset.state = state;
  status.textContent = text;
}

function choose(hasToken) {
  for (const form of document.querySelectorAll("form[data-when]")) {
    form.hidden = (form.dataset.when === "token") !== hasToken;
  }
}

function read(form) {
  const fields = [...form.querySelectorAll("input[name]")].map((input) => [input.name, input.value]);
  return form.dataset.when === "token" ? { token, ...Object.fromEntries(fields) } : Object.fromEntries(fields);
}

async function send(form) {
  const answer = await fetch(form.dataset.action, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(read(form)),
    credentials: "omit",
  });
  if (answer.ok) {
    form.hidden = true;
    say("done", form.dataset.done);
    return;
  }
  const { error } = await answer.json();
  say("failed", error.message);
  if (error.code === "InvalidEmailToken" || error.param === "token") choose(false);
}

async function submit(event) {
  event.preventDefault();
  const form = event.currentTarget;
  const [first, again] = form.querySelectorAll("input[type=password]");
  if (again && first.value !== again.value) {
    say("failed", "The two passwords are not the same.");
    return;
  }
  const button = form.querySelector("button");
  button.disabled = true;
  say("", "");
  try {
    await send(form);
  } catch {
    say("failed", "The server does not answer. Try again in a moment.");
  } finally {
    button.disabled = false;
  }
}

choose(token !== "");
for (const form of document.forms) form.addEventListener("submit", submit);
