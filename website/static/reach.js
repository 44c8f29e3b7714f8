// What scrolls, in either direction, can be reached by keyboard.
function reach() {
  for (const box of document.querySelectorAll(".highlight pre, .front :is(pre, .program), .table-wrapper, div.math")) {
    const scrolls = box.scrollWidth > box.clientWidth || box.scrollHeight > box.clientHeight;
    if (scrolls) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
}
reach();
addEventListener("resize", reach);
addEventListener("toggle", reach, true); // an answer is unfolded
