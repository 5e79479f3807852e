"""`sample` command: continues prompts with a model, or runs a chat."""
