"""Room edge: what holds for any HTTP request, whichever page it asks for."""
