"""Collections of documents: read once, then a question's text by `@name`, whole or in passages."""
