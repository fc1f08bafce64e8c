// Keeps each flag in one piece: a browser breaks a line behind the two hyphens of --data.url.
for (const code of document.querySelectorAll(".md-typeset :not(pre) > code")) {
  code.innerHTML = code.innerHTML.replace(/--[a-z][\w.-]*\w/g, '<span class="flag">$&</span>');
}
