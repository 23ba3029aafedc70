"""The colors of pages and plots."""

# Each color on a light and on a dark page. Blue, orange and gray differ for every kind of color vision.
COLORS = {
    "ink": ("#1c2127", "#e6e9ed"),
    "muted": ("#5c6570", "#9aa5b1"),
    "rule": ("#dfe3e8", "#2d343d"),
    "accent": ("#0f62a8", "#6cb4ee"),
    "pale": ("#a9c4dd", "#3f607f"),
    "warning": ("#b4490a", "#f0a04b"),
    "surface": ("#ffffff", "#15191e"),
    "sunken": ("#f5f6f8", "#1c2228"),
}
