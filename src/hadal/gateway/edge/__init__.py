"""Room edge: rules for every HTTP request, independent of its page."""
