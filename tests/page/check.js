// Checks in a browser. The outcome stands in the page, as `data-outcome` of its root, and is sent to `outcome` beside it.

const failures = [];
let checks = 0;

/** Notes a failure where two values are not the same. */
export function same(found, expected, what) {
  checks += 1;
  const [is, should] = [found, expected].map((value) => JSON.stringify(value));
  if (is !== should) failures.push(`${what}: found ${is}, expected ${should}`);
}

/** Notes a failure where something does not hold. */
export const holds = (condition, what) => same(Boolean(condition), true, what);

/** Runs all checks, and tells what came of them. */
export async function run(all) {
  try {
    await all();
  } catch (error) {
    failures.push(`a check ended early: ${error.stack ?? error}`);
  }
  const outcome = failures.length === 0 ? "passed" : "failed";
  document.body.append(...failures.map((failure) => Object.assign(document.createElement("p"), { textContent: failure })));
  Object.assign(document.documentElement.dataset, { checks, outcome });
  await fetch(`outcome?of=${document.title}`, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ of: document.title, outcome, checks, failures }),
  });
}
