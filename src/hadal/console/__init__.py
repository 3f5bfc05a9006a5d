"""Pages for people, in a process of their own: a chat with the model, and the deployment at work."""

import os

# NiceGUI would keep a thousand texts that it rendered: all states of what users are answered.
os.environ.setdefault("MARKDOWN_CONTENT_CACHE_SIZE", "0")
