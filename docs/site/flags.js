// Keeps each flag in one piece: a browser breaks a line behind the two hyphens of --data.url.
{
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const found = [];
  while (texts.nextNode()) {
    if (/--[a-z]/.test(texts.currentNode.data) && !texts.currentNode.parentElement.closest("pre, script, style")) {
      found.push(texts.currentNode);
    }
  }
  for (const text of found) {
    const parts = text.data.split(/(--[a-z][\w.-]*\w)/);
    text.replaceWith(...parts.map((part, place) => {
      const flag = document.createElement("span");
      flag.className = "flag";
      flag.textContent = part;
      return place % 2 ? flag : part;
    }));
  }
}
