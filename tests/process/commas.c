/* commas.c - in a process whose locale has decimal commas: reads settings from the environment, makes the library print reals, and
 * writes all to stdout. Ends with 77 if the locale of the environment has no commas. */
#include "mlfab.h"

#include <locale.h>
#include <stdio.h>
#include <string.h>

static void tell(const char *what, int code, const mlfab_error *error) {
  printf("%s: %s\n", what, code ? error->text : "done");
}

int main(void) {
  char here[16];
  mlfab_model_options model;
  mlfab_filter filter = {.size = sizeof filter};
  mlfab_config config;
  mlfab_error error;
  if (!setlocale(LC_ALL, "")) return 77;
  snprintf(here, sizeof here, "%.1f", 0.5);
  if (strcmp(here, "0,5") != 0) return 77;
  mlfab_model_options_init(&model);
  mlfab_config_init(&config);
  int code = mlfab_model_options_from_env(&model, &error);
  tell("environment", code, &error);
  printf("read: %d\n", model.gamma == 0.5 && model.beta1 == 0.75);
  tell("point", mlfab_model_options_set(&model, "gamma", "0.25", &error), &error);
  printf("set: %d\n", model.gamma == 0.25);
  tell("comma", mlfab_model_options_set(&model, "gamma", "0,25", &error), &error);
  tell("filter", mlfab_filter_set(&filter, "filter_threshold", "0.125", &error), &error);
  printf("filtered: %d\n", filter.threshold == 0.125);
  mlfab *fabric = NULL;
  code = mlfab_config_from_env(&config, &error);
  if (!code) code = mlfab_open(&config, &fabric, &error);
  tell("open", code, &error);
  if (code) return 1;
  /* An error of the library that shows a real. */
  float zeros[4] = {0};
  mlfab_buf all = {MLFAB_ALL, 0, zeros, 4};
  code = mlfab_tensor_add(fabric, 0, MLFAB_F32, 4);
  model.epsilon = -0.5;
  model.optimizer = MLFAB_OPTIMIZER_ADAM;
  if (!code) code = mlfab_model_start(fabric, &model, &all, 1);
  mlfab_last_error(fabric, &error);
  tell("real", code, &error);
  snprintf(here, sizeof here, "%.1f", 0.5);
  printf("own: %s\n", here);
  return mlfab_close(&fabric) != 0;
}
