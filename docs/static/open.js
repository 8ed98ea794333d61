// Unfold what the address names: browsers that do not by themselves jump to the wrong place.
const unfold = () => {
    let element = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const target = element;
    for (; element; element = element.parentElement) if (element.tagName === "DETAILS") element.open = true;
    target?.scrollIntoView();
};
addEventListener("hashchange", unfold);
addEventListener("DOMContentLoaded", unfold);
