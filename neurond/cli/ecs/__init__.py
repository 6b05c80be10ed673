"""ECS task definitions: text, fields, rules between fields, placement. Pure: nothing is opened, asked or run here."""
