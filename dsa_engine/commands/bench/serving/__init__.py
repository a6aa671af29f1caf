"""The serving benchmark: requests that arrive over time at a server with the OpenAI API."""
