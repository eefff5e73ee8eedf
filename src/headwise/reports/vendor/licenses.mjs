// Prints name, version and licence text of every package that is in the bundle (meta.json says which).
import {readFileSync, readdirSync} from "node:fs";

const [output] = Object.values(JSON.parse(readFileSync("meta.json", "utf8")).outputs);
const names = new Set();
for (const [path, {bytesInOutput}] of Object.entries(output.inputs)) {
  if (bytesInOutput === 0) continue;
  const found = path.match(/^node_modules\/((?:@[^/]+\/)?[^/]+)\//);
  if (found) names.add(found[1]);
}
console.log("charts.min.js contains code of the packages below, each under its own licence.\n");
for (const name of [...names].sort()) {
  const folder = `node_modules/${name}`;
  const about = JSON.parse(readFileSync(`${folder}/package.json`, "utf8"));
  const file = readdirSync(folder).find((entry) => /^licen[cs]e/i.test(entry));
  if (!file) throw new Error(`${name} carries no licence file`);
  console.log(`${"=".repeat(80)}\n${name} ${about.version} (${about.license})\n`);
  console.log(`${readFileSync(`${folder}/${file}`, "utf8").trim()}\n`);
}
