#include "../vec/baseline.h"

#define HEADWISE_TARGET baseline
#include "../generic/target.h"
