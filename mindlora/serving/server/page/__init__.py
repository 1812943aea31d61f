"""The page that ``mindlora serve`` shows a browser: chats with one model, or with two side by side."""
