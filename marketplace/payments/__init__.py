"""Money that arrives and goes back: payment intents, webhooks, refunds, receipts."""
