"""Generated answers of chats: reasoning, content and tool calls, told apart as the text comes."""
