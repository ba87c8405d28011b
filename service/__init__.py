"""Bundle -> HTTP. Never imports torch and knows nothing of export/."""
