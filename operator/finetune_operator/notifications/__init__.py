"""Tells other systems about moves of aliases: webhooks of the platform team, and a line of the operator's log for each move."""
