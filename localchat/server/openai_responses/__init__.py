"""OpenAI's Responses API without stored responses: request types, translation to a chat, answers."""
