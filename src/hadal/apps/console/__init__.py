"""Web pages, in a separate process: a chat with the model, and a view of the running deployment."""
