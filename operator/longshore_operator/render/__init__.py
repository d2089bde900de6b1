"""Renders the objects of a deployment from its checked spec. Pure: equal input gives equal bytes."""
