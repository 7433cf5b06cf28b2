// Numbers as people read them, with their units.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const BYTE_UNITS = ["B", "kB", "MB", "GB", "TB"];

/** 12,345 */
export const count = (number) => whole.format(number);

/** 1 token, 12,345 tokens. */
export const tokens = (number) => `${count(number)} ${number === 1 ? "token" : "tokens"}`;

/** Three digits that matter: 0.42, 8.31, 42.1, 1,234. */
export function short(number) {
  const digits = number >= 100 || number === 0 ? 0 : number >= 10 ? 1 : 2;
  return number.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** 0.42 s, 12.3 s, 4 min 5 s, 3 h 12 min. */
export function duration(seconds) {
  if (seconds < 60) return `${short(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  if (minutes < 24 * 60) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return `${Math.floor(minutes / 1440)} d ${Math.floor(minutes / 60) % 24} h`;
}

/** 1.77 MB: decimal, as links and disks are measured. */
export function bytes(number) {
  const power = number < 1000 ? 0 : Math.min(Math.floor(Math.log10(number) / 3), BYTE_UNITS.length - 1);
  return `${power === 0 ? count(number) : short(number / 1000 ** power)} ${BYTE_UNITS[power]}`;
}

/** 42.1 %, of a part and its whole; a dash where there is no whole. */
export const share = (part, all) => (all > 0 ? `${short((100 * part) / all)} %` : "–");
