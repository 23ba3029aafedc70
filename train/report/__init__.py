"""The report of a finished run: its page, its plots, and the export's model card on the Hub."""
