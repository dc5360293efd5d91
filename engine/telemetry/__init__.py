"""What a stage measures: utilisation, trace recordings, prefill cost."""
