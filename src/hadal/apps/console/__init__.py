"""Pages for people, in a process of their own: a chat with the model, and the deployment at work."""
