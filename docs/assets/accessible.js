// What the theme leaves without a name or out of reach of the keyboard, which axe finds.
function name_all() {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  for (const wide of document.querySelectorAll(".md-typeset__scrollwrap")) wide.tabIndex = 0;
  document.querySelectorAll(".md-code__nav").forEach((tools, number) => {
    tools.setAttribute("aria-label", `Tools of code block ${number + 1}`);
  });
}
new MutationObserver(name_all).observe(document.body, { childList: true, subtree: true });
name_all();
