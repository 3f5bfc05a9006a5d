"""Room results: result files of commands, read, drawn and shown as pages."""
