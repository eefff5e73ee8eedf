// What the report takes from other people's work; build.sh bundles it into charts.min.js.
import "sortable-tablesort/dist/esm/sortable.js";

export {plot, cell, dot, gridY, legend, ruleX, ruleY, text} from "@observablehq/plot";
export {interpolateViridis} from "d3-scale-chromatic";
