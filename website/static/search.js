// Words that are written in several ways: a search for one of them finds the others.
const SAME = [
  [/\ball[- ]?reduce\b/gi, "all_reduce"], [/\ball[- ]?gather\b/gi, "all_gather"],
  [/\breduce[- ]?scatter\b/gi, "reduce_scatter"], [/\ball[- ]?to[- ]?all\b/gi, "all_to_all"],
];
if (typeof Search !== "undefined") {
  const query = Search.query;
  Search.query = (words) => query(SAME.reduce((text, [written, found]) => text.replace(written, found), words));
  const read = Search.htmlToText; // words of two elements stay apart
  Search.htmlToText = (html, anchor) => read(html.replace(/<(?=\/?(?:a|button|div|h\d|label|legend|li|option|p|pre|t[dhr])\b)/g, " <"), anchor);
}
