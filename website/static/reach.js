// What scrolls sideways can be reached by keyboard.
function reach() {
  for (const box of document.querySelectorAll(".highlight pre, .table-wrapper, div.math")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
}
reach();
addEventListener("resize", reach);
addEventListener("toggle", reach, true); // an answer is unfolded
