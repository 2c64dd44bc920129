// Command kstatus reads a JSON list of objects and prints, as a JSON list, what kstatus says of each.
package main

import (
	"encoding/json"
	"fmt"
	"os"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/cli-utils/pkg/kstatus/status"
)

// said is the status of one object, and the sentence that explains it.
type said struct {
	Status  status.Status `json:"status"`
	Message string        `json:"message"`
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "kstatus:", err)
		os.Exit(1)
	}
}

func run() error {
	// Unstructured decodes whole numbers as such; encoding/json alone would make them floats, which kstatus refuses.
	var objects []unstructured.Unstructured
	if err := json.NewDecoder(os.Stdin).Decode(&objects); err != nil {
		return err
	}
	answers := make([]said, 0, len(objects))
	for index := range objects {
		result, err := status.Compute(&objects[index])
		if err != nil {
			return err
		}
		answers = append(answers, said{result.Status, result.Message})
	}
	return json.NewEncoder(os.Stdout).Encode(answers)
}
