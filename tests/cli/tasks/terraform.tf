resource "aws_ecs_task_definition" "train" {
  family = "train"
  container_definitions = jsonencode([
    { name = "trainer", image = "train:7" }
  ])
}
